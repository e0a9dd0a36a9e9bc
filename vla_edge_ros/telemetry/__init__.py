"""What happened: stages, ages, traces. Observes and decides nothing."""
