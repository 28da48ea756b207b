"""The studies behind the docs, a small file each; `eco-dist experiment NAME` runs one."""
