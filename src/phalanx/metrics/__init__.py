"""A run's numbers for other people's tools: Prometheus, OTLP, TensorBoard, MLflow, W&B. Reads the run folder only."""
