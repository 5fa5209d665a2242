"""Guards against silent errors: digests of what ranks hold, copies that differ, memory that changes, spikes."""
