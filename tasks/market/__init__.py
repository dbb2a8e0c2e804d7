"""The market: what clouds ask and have, now and before."""
