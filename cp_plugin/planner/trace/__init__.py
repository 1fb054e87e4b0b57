"""A method run without data or peers, and its events run against each other in time."""
