"""Guards against silent errors: diverging replicas, changed memory, wrong compiled code, spikes of the gradient."""
