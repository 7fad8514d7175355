"""`mrl from-verl`: a verl run's script or settings translated into a config."""
