"""Host: the simulated robot, in MuJoCo."""
