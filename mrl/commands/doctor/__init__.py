"""`mrl doctor`: checks of this machine, of the network between hosts, and of the files that a config names."""
