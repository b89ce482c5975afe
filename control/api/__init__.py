"""What scripts and actors are written with: meshes, endpoints and what lies between them and the runtime."""
