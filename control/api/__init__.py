"""The API for scripts and actors: meshes, endpoints, and the code between them and the runtime."""
