"""Long runs against a real server: thousands of requests of every kind, and processes that are killed."""
