data {
  int<lower=1> N;
  int<lower=1> F;
  matrix[N, F] x;
  int<lower=2> classes;
  array[N] int<lower=1, upper=classes> y;  // labels from 1
  int<lower=1> width;
  real<lower=0> sigma;
}
parameters {
  matrix[F, width] hidden_weight;
  row_vector[width] hidden_bias;
  matrix[width, classes] output_weight;
  row_vector[classes] output_bias;
}
model {
  matrix[N, classes] f = tanh(x * hidden_weight + rep_matrix(hidden_bias, N)) * output_weight
                         + rep_matrix(output_bias, N);
  to_vector(hidden_weight) ~ normal(0, sigma / sqrt(F));
  hidden_bias ~ normal(0, sigma);
  to_vector(output_weight) ~ normal(0, sigma / sqrt(width));
  output_bias ~ normal(0, sigma);
  for (n in 1 : N) {
    y[n] ~ categorical_logit(f[n]');
  }
}
