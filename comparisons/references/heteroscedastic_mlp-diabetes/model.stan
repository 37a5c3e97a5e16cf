data {
  int<lower=1> N;
  int<lower=1> F;
  matrix[N, F] x;
  vector[N] y;
  int<lower=1> width;
  real<lower=0> sigma;
}
parameters {
  matrix[F, width] hidden_weight;
  row_vector[width] hidden_bias;
  matrix[width, 2] output_weight;
  row_vector[2] output_bias;
}
model {
  matrix[N, 2] f = tanh(x * hidden_weight + rep_matrix(hidden_bias, N)) * output_weight + rep_matrix(output_bias, N);
  to_vector(hidden_weight) ~ normal(0, sigma / sqrt(F));
  hidden_bias ~ normal(0, sigma);
  to_vector(output_weight) ~ normal(0, sigma / sqrt(width));
  output_bias ~ normal(0, sigma);
  y ~ normal(col(f, 1), log1p_exp(col(f, 2)));
}
