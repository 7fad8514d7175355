"""`mrl rehearse`: a cluster's config on this machine's CPU, shrunk but whole."""
