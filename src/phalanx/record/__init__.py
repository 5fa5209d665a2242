"""What happened: run folders, the events of their ranks, and the report made of them. No torch."""
