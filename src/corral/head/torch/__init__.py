"""The head in torch: any device, any dtype, a vocabulary split over processes."""
