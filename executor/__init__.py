"""Fleets, leases, agents and the gateway: from a plan to machines that serve it."""
