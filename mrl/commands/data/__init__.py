"""`mrl data`: public data sets as files in mrl's format."""
