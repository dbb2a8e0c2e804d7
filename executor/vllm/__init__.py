"""What runs inside the environment that has vLLM."""
