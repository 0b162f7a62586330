"""The common parts of prefill and decode pods: settings, runtime, control service, metrics."""
