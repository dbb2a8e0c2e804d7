"""Offline placement: the best way one combination of nodes serves one phase of a workload."""
