"""What Coral is compared with; every baseline obeys the same caps and data."""
