"""`mrl doctor`: what is wrong on this machine, between the hosts, and with what a config names."""
