"""Care of what a project keeps: `dejavu backup`, `dejavu restore`, `dejavu gc`."""
