"""A model's weights in an object store: pushed once, fetched by each node for its own layers."""
