"""How a job is started: the launcher's environment, the route to it, rendered scripts."""
