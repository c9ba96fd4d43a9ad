"""Preflight: what of this machine would keep a job from running, and what to do about it."""
