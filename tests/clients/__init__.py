"""Other people's client programs, in their current releases, against a gateway: with drafters and without."""
