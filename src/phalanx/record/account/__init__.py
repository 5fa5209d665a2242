"""What a run came to: where its time, money and energy went, who was slow, what fell, and what was predicted."""
