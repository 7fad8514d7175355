"""`mrl doctor`: what is wrong here, between the hosts and with a config."""
