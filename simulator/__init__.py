"""Discrete-event simulation of a fleet under a request trace."""
