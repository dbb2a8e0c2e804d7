"""The gateway: OpenAI-compatible requests in, to the replicas that the plan says."""
