"""Where tokens go when the gate does not say: rules, recorded traces, load tables."""
