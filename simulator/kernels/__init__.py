"""The compiled event loop: arrays in, arrays out, nothing allocated."""
