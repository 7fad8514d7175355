"""`mrl rehearse`: runs a cluster's config end to end on this machine's CPU, with a reduced model and layout."""
