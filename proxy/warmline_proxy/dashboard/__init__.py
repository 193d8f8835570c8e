"""Dashboard files and queries; imports admin and the layers below; event loop, aggregation on threads."""
