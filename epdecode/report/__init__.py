"""What people read of a result: console table, HTML page, comparison, Prometheus text file."""
