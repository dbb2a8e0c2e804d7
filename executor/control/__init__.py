"""The control channel: a controller, and an agent on every node."""
