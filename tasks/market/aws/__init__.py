"""AWS as a source: requests and answers as values, and the calls between them."""
