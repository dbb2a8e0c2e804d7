"""AWS by boto3: clients with bounded patience, and its errors in one sentence each."""

LEASE_TAG = "coral:lease"  # on every instance and volume that Coral launches
