"""What prefill and decode pods have in common: settings, runtime, control service, metrics."""
