"""What a rank tells of itself while it trains: the inside of its steps, its machine, its neighbours."""
