"""Device meshes, logical axes, and the placement of arrays over them."""
