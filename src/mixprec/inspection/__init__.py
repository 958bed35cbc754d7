"""What a run does to its numbers while it trains: statistics, and alarms about them."""
