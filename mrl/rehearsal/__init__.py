"""`mrl rehearse`: a production config on this machine's CPU, shrunk but whole."""
