"""`mrl from-verl`: translates the script or the settings of a verl run into a config."""
