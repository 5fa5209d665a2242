"""The vault: what every rank knew after its last steps, in memory that outlives its process. See docs/vault.md."""
