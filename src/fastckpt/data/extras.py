"""What to install where an optional library is missing: its requirement and extra are those of pyproject.toml."""

# name: (requirement, extra)
LIBRARIES = {
    "zstandard": ("zstandard>=0.22", "data"),
    "zarr": ("zarr>=3.0.8", "data"),
    "cryptography": ("cryptography>=41", "encryption"),
    "pyarrow": ("pyarrow>=14", "arrow"),
}


def missing(error, library, purpose):
    """The error for a library that cannot be imported."""
    return ModuleNotFoundError(
        f"{library} is not installed: {purpose}; {remedy(library)}", name=error.name
    )


def remedy(library):
    requirement, extra = LIBRARIES[library]
    return f"pip install '{requirement}', or this package's extra {extra!r}, brings it"
