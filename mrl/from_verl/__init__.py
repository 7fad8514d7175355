"""`mrl from-verl`: a config of mrl from a verl run."""
