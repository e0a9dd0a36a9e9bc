"""Host: ROS 2."""
