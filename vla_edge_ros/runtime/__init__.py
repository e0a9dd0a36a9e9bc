"""The real-time core: frame transport, admission, action queue and the control loop."""
