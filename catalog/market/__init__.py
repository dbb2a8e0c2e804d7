"""The market in the catalog: prices as changes, what was asked when, and evidence of stock."""
