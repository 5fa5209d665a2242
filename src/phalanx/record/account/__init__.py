"""What a run came to: where its time, money and energy went, who was slow, what failed, and what was predicted."""
