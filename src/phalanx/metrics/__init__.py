"""Export of a run's metrics to Prometheus, OTLP, TensorBoard, MLflow and W&B. Only the run folder is read."""
