"""Evidence: benchmarks, reports, training."""
